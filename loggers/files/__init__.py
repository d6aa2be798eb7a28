"""File formats that the loggers write: event files, tables and folders."""
