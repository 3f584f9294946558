"""What the management API says, and what a command makes of the records. Pure."""
