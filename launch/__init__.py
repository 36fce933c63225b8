"""What is run by hand around the stages: the quickstart, serving a drafter, measuring it on a live server."""
