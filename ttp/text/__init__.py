"""What people read: sizes, counts and ranks in words, and the console that they are printed on."""
