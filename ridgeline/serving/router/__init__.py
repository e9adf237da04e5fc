"""The router: one address before several servers ([docs/routing.md]). It chooses a server for each request by a rule of
`ridgeline.routing`, and passes the request and its answer on as they come."""
