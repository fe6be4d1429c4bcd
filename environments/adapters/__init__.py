"""Third-party interfaces: each file makes environments of one library playable here."""
