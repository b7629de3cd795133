"""TTP beside other systems that survive the death of a rank: the same trainer, the same kills, one job at a time."""
