"""No two modules import each other, directly or through others: not at the top, in a function, or for types alone."""

import grimp


def circles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """Return the groups of modules in which each one reaches every other one by imports."""
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = {frozenset({one, *(other for other in reached[one] if one in reached[other])}) for one in reached}
    return {group for group in groups if len(group) > 1}


def test_modules_do_not_import_in_circles():
    found = circles(grimp.build_graph("distlab", "simulator", cache_dir=None))
    named = sorted(" <-> ".join(sorted(group)) for group in found)
    assert not named, f"circles of imports, end them (move what both need into a third file): {named}"


def test_a_circle_through_a_third_module_is_found():
    graph = grimp.ImportGraph()
    for importer, module in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")):
        graph.add_import(importer=importer, imported=module)
    assert circles(graph) == {frozenset("abc")}
