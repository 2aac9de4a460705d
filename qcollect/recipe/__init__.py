"""Recipes: what a user writes in YAML, validated at the edge, frozen records inside.

    recipe.yaml --document--> values + line numbers --overrides--> --schema--> records

``records`` and ``selectors`` are plain Python (a worker rebuilds its recipe from ``plan.json`` with
them); pydantic and YAML are needed only by ``load``.
"""
