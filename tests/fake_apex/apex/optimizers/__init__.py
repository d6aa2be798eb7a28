"""Here only so that the folder looks like Apex's."""
