"""Graph, mesh, typed placements, plan, and the verifier: plain frozen data, no search."""
