"""What a device can do, and how long an operator takes on it."""
