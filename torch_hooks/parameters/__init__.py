"""Parameters: named, broadcast, averaged, compared."""
