"""The web page of `llamatrain ui`: its server, and the files of the page."""
