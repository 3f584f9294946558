"""What becomes of records: the next action for each, where groups go, how many there are to be. Pure."""
