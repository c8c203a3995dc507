"""What mindllm claims, held against a few small runs on devices or, where there are none, on processes of this machine.

claim ──runs──▶ RunConfig ──expected──▶ dry run, step, links ──┐
                    └──────measured──▶ losses, step, peak, profile ──judge──▶ lines ──▶ Acceptance ──▶ table, page, archive
"""
