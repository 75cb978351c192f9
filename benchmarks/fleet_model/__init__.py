"""A discrete-event model of a fleet of workers: arrivals, engines, a queue or routers, and what clients see."""
