"""What is known about each type of events: one entry a type, one method a reader."""
