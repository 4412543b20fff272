"""What a person reads: progress, summaries, the letter grid of a table."""
