"""The one exception whose message is meant for the user."""


class JigsawError(Exception):
    """Something the user can mend: one to three lines that say what is wrong and what to do. Exit code 2."""
