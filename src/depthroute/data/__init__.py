"""Text to batches: documents, sources, vocabulary, tokens on disk, what a step sees."""
