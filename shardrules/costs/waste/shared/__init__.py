"""What the kinds of waste look up: where values come from and go to, loops, overlap."""
