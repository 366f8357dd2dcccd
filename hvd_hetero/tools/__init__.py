"""What people run before and after a training: they import what trains, and are never imported by it."""
