"""Ops on pixels: from decoded pictures to the rows that a tower reads."""
