"""Many processes: who is there, and a model wrapped so that they train it together."""
