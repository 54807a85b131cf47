"""Define the assertions that ``shardrules.testing`` exports, and the pytest plugin."""
