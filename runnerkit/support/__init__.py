"""Small independent parts: arguments, names, pickling, copies between devices, text."""
