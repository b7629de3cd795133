"""What people read: sizes, counts and ranks as text, and the console that they are printed on."""
