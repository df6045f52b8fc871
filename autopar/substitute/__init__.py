"""Graph → equivalent Graphs: rules that are generated, proved and searched (TASO, OSDI'22 Unity)."""
