"""Other systems on the quickstart's work: scripts run by environments of their own, with one JSON line a step."""
