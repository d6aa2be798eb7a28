"""Shares of streams: their lanes if they can be divided, otherwise their samples."""
