"""The job under test, and what can be seen of it from outside: steps, journals, memory."""
