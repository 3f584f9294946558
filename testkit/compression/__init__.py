"""What tests of compression share."""
