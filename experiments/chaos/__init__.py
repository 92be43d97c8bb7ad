"""Whole runs while their parts are killed and stopped at random, their bucket misbehaves and connections break."""
