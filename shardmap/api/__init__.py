"""What users call, and how a call becomes a program."""
