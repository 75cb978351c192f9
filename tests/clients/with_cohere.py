"""cohere, Cohere's SDK, with both of its APIs."""

import cohere
from checks import QUERY, TEXTS, Site, check, main, same, same_ranking, same_rows
from cohere.errors import BadRequestError

KIND = "search_document"


@check("ClientV2: embed (float, base64, ubinary), rerank with top_n and return_documents")
def second(site: Site) -> None:
    client = cohere.ClientV2("none", base_url=site.root)
    options = {"model": site.embedder, "texts": TEXTS, "input_type": KIND}
    found = client.embed(**options, embedding_types=["float", "base64", "ubinary"]).embeddings
    same_rows(found.float_, site.rows)
    same((len(found.base64), len(found.ubinary[0])), (3, len(site.rows[0]) // 8))
    ranked = client.rerank(model=site.reranker, query=QUERY, documents=TEXTS).results
    same_ranking([(each.index, each.relevance_score) for each in ranked], site.ranking)
    same(len(client.rerank(model=site.reranker, query=QUERY, documents=TEXTS, top_n=2).results), 2)


@check("Client (API v1): embed, rerank")
def first(site: Site) -> None:
    client = cohere.Client("none", base_url=site.root)
    found = client.embed(model=site.embedder, texts=TEXTS, input_type=KIND)
    same_rows(found.embeddings, site.rows)
    ranked = client.rerank(model=site.reranker, query=QUERY, documents=TEXTS, return_documents=True).results
    same_ranking([(each.index, each.relevance_score) for each in ranked], site.ranking)
    same([each.document.text for each in ranked], [TEXTS[index] for index, _ in site.ranking])


@check("AsyncClientV2; an error is a BadRequestError")
async def errors(site: Site) -> None:
    client = cohere.AsyncClientV2("none", base_url=site.root)
    found = await client.embed(model=site.embedder, texts=TEXTS, input_type=KIND, embedding_types=["float"])
    same_rows(found.embeddings.float_, site.rows)
    try:
        await client.rerank(model=site.embedder, query=QUERY, documents=TEXTS)
    except BadRequestError as error:
        same((error.status_code, "computes embeddings" in str(error)), (400, True))
        return
    raise AssertionError("no BadRequestError")


if __name__ == "__main__":
    main("cohere")
