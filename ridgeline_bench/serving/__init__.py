"""Load on a server that speaks OpenAI's API, with requests that leave at their time whatever the server does."""
