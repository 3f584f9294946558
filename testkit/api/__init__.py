"""What tests of api share."""
