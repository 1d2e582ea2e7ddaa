"""Which of many engines a request goes to."""
