"""Processes: started, connected, fed and ended."""
