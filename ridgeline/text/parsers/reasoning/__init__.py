"""The forms in which models set their reasoning apart, one file for each."""
