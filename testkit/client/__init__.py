"""What tests of client share."""
