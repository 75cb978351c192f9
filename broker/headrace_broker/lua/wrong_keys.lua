-- Which keys hold something of another type than they should, read and nothing written. KEYS: keys. ARGV: the type of each.
-- Returns {index from 0, what is wrong, index, what is wrong, ...}.
local wrong = {}
for i, key in ipairs(KEYS) do
  local problem = problem_of(key, ARGV[i])
  if problem then
    wrong[#wrong + 1] = i - 1
    wrong[#wrong + 1] = problem
  end
end
return wrong
