"""The usage ledger: how many tokens each tenant, API key and model has used."""
