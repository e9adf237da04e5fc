"""The forms in which models write tool calls, one file for each."""
