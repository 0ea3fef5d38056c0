"""Where training data comes from and how it is laid out: task streams, stored trajectories, packed rows."""
