"""Who may come in, and how much of a server one client may use: limits, quotas, refusals, credentials."""
