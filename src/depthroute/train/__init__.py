"""Time: settings, optimiser, a step, and the experiment: one loop for one or many methods."""
