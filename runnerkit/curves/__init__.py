"""What runs logged: read back, compared, drawn."""
