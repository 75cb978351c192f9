-- All replicas use Redis's clock.
-- ARGV: requests_a_minute, tokens_a_minute
-- 0: no limit.
-- Returns {admitted, requests left, tokens left, seconds until the next can be admitted}; numbers as strings.
local bounds = {requests = tonumber(requests_a_minute), tokens = tonumber(tokens_a_minute)}
local levels, wait = {}, 0
for name, bound in pairs(bounds) do
  if bound > 0 then
    levels[name] = level_of(name, bound)
    if levels[name] < 1 then
      wait = math.max(wait, (1 - levels[name]) * 60 / bound)
    end
  end
end
if wait == 0 and levels.requests then
  levels.requests = levels.requests - 1
  keep(levels, bounds)
end
return {wait == 0 and 1 or 0, tostring(levels.requests or 0), tostring(levels.tokens or 0), tostring(wait)}
