"""Tools for the logs of past runs: tables, comparisons, plots and reports."""
