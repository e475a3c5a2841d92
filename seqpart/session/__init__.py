"""One run: opened, its stages carried out under an observer, and for a fit its results written."""
