"""The management API's messages, and the changes that commands make to the records. Pure."""
