"""What loses sinks in this installation and with this checkpoint, and what helps."""
