-- All replicas use Redis's clock.
-- ARGV: requests_a_minute, tokens_a_minute, requests_wanted
-- requests_a_minute, tokens_a_minute: 0: no limit. requests_wanted: number of requests to take.
-- Returns {1 if admitted, else 0; requests left; tokens left; seconds to wait}, the last three as strings.
local bounds = {requests = tonumber(requests_a_minute), tokens = tonumber(tokens_a_minute)}
local needed = {requests = tonumber(requests_wanted), tokens = 1}
local levels, wait = {}, 0
for name, bound in pairs(bounds) do
  if bound > 0 then
    levels[name] = level_of(name, bound)
    if levels[name] < needed[name] then
      wait = math.max(wait, (needed[name] - levels[name]) * 60 / bound)
    end
  end
end
if wait == 0 and levels.requests then
  levels.requests = levels.requests - needed.requests
  keep(levels, bounds)
end
return {wait == 0 and 1 or 0, tostring(levels.requests or 0), tostring(levels.tokens or 0), tostring(wait)}
