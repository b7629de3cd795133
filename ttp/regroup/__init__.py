"""Process groups that are closed and made again while their processes live on, and the rehearsal of it."""
