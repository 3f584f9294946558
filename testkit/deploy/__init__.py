"""What tests of deploy share."""
